// The fat binary of kernels.cu, between two names; and whether it checks ranges.
        .section .rodata
        .balign 64
        .globl  epd_cuda_image
        .hidden epd_cuda_image
        .globl  epd_cuda_image_end
        .hidden epd_cuda_image_end
epd_cuda_image:
        .incbin EPD_CUDA_IMAGE
epd_cuda_image_end:
        .globl  epd_cuda_image_checks
        .hidden epd_cuda_image_checks
epd_cuda_image_checks:
#ifdef EPD_KERNEL_ASSERTS
        .byte 1
#else
        .byte 0
#endif
        .section .note.GNU-stack, "", %progbits
